"""Diagnosis: what `launchers/doctor.py` is composed of."""
