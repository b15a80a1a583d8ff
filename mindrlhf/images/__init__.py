"""Images as a vision model takes them: read, turned upright, resized, cut into patches.

The numbers are those of Hugging Face's processor of Qwen2-VL and Qwen2.5-VL, to the last bit. Files are decoded by
Pillow; the resize is written here, because Pillow's result depends on its version. Imports no MindSpore.
"""
