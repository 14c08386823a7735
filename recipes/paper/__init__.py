"""The paper's ablations, figures, tables and costs."""
