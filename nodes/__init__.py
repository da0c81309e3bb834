"""PipeDiT in ComfyUI: thin nodes over the engine. `convert` is the only file that knows both sides' tensors."""
