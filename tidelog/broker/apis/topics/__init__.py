"""APIs that create, change and delete topics, and that show and change configs."""
