"""Video diffusion on a pool of processes: the engine behind the ComfyUI nodes and the command line. Importing it loads nothing."""
