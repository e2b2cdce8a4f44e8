"""A simulated CUDA device for a torch without CUDA, to test code for GPUs without a GPU.

Memory is host memory, operators are the CPU's, and streams are queues that run as late as CUDA
allows. A missing wait, event or ``record_stream`` then shows as wrong values, every time. See
`tests.simulated_cuda.device`.
"""
