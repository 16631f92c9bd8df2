"""APIs of consumer groups. The group coordinator itself is in `broker/coordinators/group/`."""
