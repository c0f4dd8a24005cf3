"""scratch until E2's arrives"""
