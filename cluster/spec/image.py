"""The container image that jobs use by default, and how to get one that is missing. Pure."""

DEFAULT_IMAGE = "trainer:0.1"


def how_to_get(image: str, engine: str) -> str:
    """Return how to get an image that this machine's container engine lacks."""
    if image == DEFAULT_IMAGE:
        return "build it in a clone of the repository: make image; or name another: --image NAME"
    return f"{engine} pull {image}, or build it: {engine} build -t {image} FOLDER"
