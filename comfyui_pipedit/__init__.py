"""Video diffusion on a pool of processes: the engine of the nodes and the command line. Importing it is cheap."""
