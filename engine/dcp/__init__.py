"""Resumable checkpoints: a training state as a torch.distributed.checkpoint folder, written and
read by all ranks.
"""
