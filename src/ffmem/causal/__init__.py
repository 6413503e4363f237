"""What memories do: traced on a prompt, switched, measured by ablation, written into weights."""
