"""The report of `tidelog bench report` as one HTML page and as Markdown. Measures nothing."""
