"""Results made readable: text tables here, pages and figures beside."""
