"""How blocks are loaded and saved."""
