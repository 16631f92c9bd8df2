"""The commands behind `tidelog`; each file is imported only when its command runs."""
