"""How a conversation becomes tokens: views, templates, spans, policies, reasoning, tools. No torch."""
