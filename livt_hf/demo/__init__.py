"""The demo: a model in the browser, on this machine alone. `livt_hf.demo.app` needs the extra `livt-hf[demo]`."""
