"""For Ray actors that own engines, and the hub as one."""
