"""The embedded demo model: a small text-to-video model of the Wan architecture, its weights and how they were made."""
