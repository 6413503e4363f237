"""The explorer: one local page to browse, search, trace and switch every memory."""
