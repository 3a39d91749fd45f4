"""Tests: one folder for each folder of gptmini, and promises, stress, READMEs and scripts."""
