"""What somebody with a GPU runs (``make gpu``): CUDA and NCCL in whole jobs, and the figures for docs/performance.md.

Every test is a job that is told its device. With ``HOLDFAST_GPU_TESTS_DEVICE=cpu`` the whole list runs on the CPU and
over gloo, in small sizes: to see that the jobs themselves work.
"""
