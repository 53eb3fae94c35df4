"""The local web server of the viewer. Imports `view.api` and below; needs the extra `view`."""
