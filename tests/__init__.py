"""Tests: one folder for each room of gptmini, and promises, stress, READMEs and scripts."""
