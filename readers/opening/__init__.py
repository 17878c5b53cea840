"""How samples are opened: a packed set, one at an address, a folder of image files."""
