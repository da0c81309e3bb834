"""PipeDiT in ComfyUI: thin nodes over the engine. `convert` and `conditioning` know both sides' tensors."""
