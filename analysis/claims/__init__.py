"""The claims of the Ultra-Scale Playbook's study, checked on its rows and on any other measured rows."""
