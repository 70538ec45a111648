"""Kinds of layers of published models: what each kind's weights are and what a token costs in it. No torch here.

A model is a list of layers; a layer has a mixer (attention and its like) and an MLP, either of which may be missing. A
kind lists its weights in `weights` and what it computes beyond them in `mixing`; parameters and FLOPs are sums over
these two, and so a new kind is one class.
"""
