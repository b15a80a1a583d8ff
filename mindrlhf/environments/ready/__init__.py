"""Tools and games that need nothing but this package."""
