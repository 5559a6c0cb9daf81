#!/usr/bin/env bash
# tree-sitter-bash 0.25.1 (with tree-sitter 0.26.1) reads some valid scripts otherwise than bash, and reports no error:
# `root_node.has_error` is false, so a program that trusts the tree is silently wrong.
#
#   1. Several assignments on a line of their own become the prefix of the command on the next line: bash sets A and B
#      for good, the tree says that they are set for `echo` alone.
#   2. A here-document begun with `<<` (not `<<-`) ends at a line with a tab before its marker: bash reads on.
#   3. `-` before a here-document (`python3 - <<EOF`) is in no node of the tree.
#
# Output on 2026-11-28:
#   1 program(command(variable_assignment variable_assignment command_name simple_expansion)) has_error=False
#   2 program(redirected_statement(command heredoc_redirect) command(command_name) command(command_name)) has_error=False
#   3 program(redirected_statement(command heredoc_redirect)) has_error=False
# It exits with 1 if one of them has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" --quiet install tree-sitter==0.26.1 tree-sitter-bash==0.25.1
"$folder/env/bin/python" - <<'EOF'
import sys

import tree_sitter
import tree_sitter_bash

parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def shape(node, depth):
    inner = " ".join(shape(child, depth - 1) for child in node.children if child.is_named) if depth else ""
    return f"{node.type}({inner})" if inner else node.type


EXPECTED = {
    "A=1 B=2\necho $A\n": (2, "program(command(variable_assignment variable_assignment command_name simple_expansion))"),
    "cat <<EOF\n\tEOF\nx\nEOF\n": (2, "program(redirected_statement(command heredoc_redirect) command(command_name) command(command_name))"),
    "python3 - <<'EOF'\nx\nEOF\n": (2, "program(redirected_statement(command heredoc_redirect))"),
}
changed = False
for number, (text, (depth, expected)) in enumerate(EXPECTED.items(), 1):
    root = parser.parse(text.encode()).root_node
    found = shape(root, depth)
    print(number, found, f"has_error={root.has_error}")
    changed |= found != expected or root.has_error
sys.exit(changed)
EOF
