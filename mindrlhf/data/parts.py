"""Keys of a content's parts that are images.

Imports nothing, so that processes of tools start in milliseconds.
"""

IMAGE_TYPES = ("image", "image_url")
SOURCE_KEYS = (*IMAGE_TYPES, "url", "path", "base64")
"""Keys of a part with the image itself; an `image_url` may be a group with `url`."""
