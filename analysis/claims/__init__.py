"""The claims of the Ultra-Scale Playbook's study, checked on its rows and on anyone's."""
