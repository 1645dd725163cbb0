"""What each command computes, as functions of Python: model and texts in, result out."""
