"""Views of a capture: pictures and pages that show what they say, offline."""
