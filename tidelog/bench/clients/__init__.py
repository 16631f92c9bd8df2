"""Python clients beside each other on one node of Tidelog: what a record costs the program that uses them."""
