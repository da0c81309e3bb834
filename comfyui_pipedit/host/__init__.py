"""What runs in the host process (ComfyUI, or the command line): the engine, its scheduler, and the pool of ranks."""
