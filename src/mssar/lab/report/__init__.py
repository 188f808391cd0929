"""Records and checkpoints to a page. Nothing is trained here."""
