"""Tools and environments that answer with images, sound and broken ones."""

import io

import pydantic
from PIL import Image


class ToolResponse(pydantic.BaseModel):
    """As verl's tools answer."""

    text: str | None = None
    image: list | None = None
    video: list | None = None


COLOURS = {"red": (220, 30, 40), "green": (20, 200, 60)}


def drawn(colour: str, size: tuple[int, int] = (16, 16)) -> Image.Image:
    return Image.new("RGB", size, COLOURS.get(colour, (9, 9, 9)))


def file_of(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def draw(colour: str, how: str = "pillow") -> object:
    """Draw a colour.

    Args:
        colour: red or green.
        how: form of the answer.
    """
    image = drawn(colour)
    if how == "huge":
        return b"P6 70000 70000 255 " + bytes(9)
    return {
        "pillow": image,
        "bytes": file_of(image),
        "group": {"bytes": file_of(image), "path": None},
        "parts": ["It is", {"type": "image", "image": image}, {"type": "text", "text": f"<|image_pad|>{colour}."}],
        "url": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}, "no image"],
        "two": [image, drawn("green", (8, 16))],
        "verl": ToolResponse(text=f"It is {colour}.", image=[image]),
        "verl text": ToolResponse(text="nothing to see"),
        "verl group": {"text": "a group", "image": [image]},
        "video": ToolResponse(image=[image], video=[1]),
        "broken": b"\x89PNG",
        "missing": [{"type": "image", "path": "nowhere.png"}],
        "odd": [image, 3],
        "json": {"text": "a", "image": "a.png"},
    }[how]


class Scene:
    """Begins with an image, answers with one, and then ends."""

    def reset(self, **row: str) -> object:
        self.seen = 0
        return ["Look: ", drawn("red"), " now."]

    def reply(self, text: str) -> object:
        self.seen += 1
        return drawn("green") if self.seen == 1 else None
