"""What crosses between host and workers: messages (JSON frames), the channel they travel on, buffers for tensors."""
