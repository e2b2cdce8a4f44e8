"""Weights that Holdfast publishes, kept whole and verified in a folder next to inference servers.

    holdfast-weights mirror s3://bucket/weights /dev/shm/weights --listen 127.0.0.1:9000

A version is a folder with a manifest. It may hold all files, or only the changes since another
version (a delta), from which the mirror makes the same files, byte for byte. Every byte is compared
with the trainer's digests before a version becomes visible.
"""
