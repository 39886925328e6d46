"""One pydantic section per JSON section; `engine.config.config.Config` puts them together."""
