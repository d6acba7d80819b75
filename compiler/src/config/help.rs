//! The text of `--help-config` and of docs/configuration.md.

use super::keys::sections;
use std::fmt::Write;

/// A list of tables, whose entries have keys of their own.
struct Table {
    name: &'static str,
    keys: &'static str,
    doc: &'static str,
}

const TABLES: [Table; 2] = [
    Table {
        name: "precision.override",
        keys: "scope = \"h.*.attn\", op = \"softmax\" or both, and dtype = \"fp32\"",
        doc: "computes matching operations in another dtype; output = \"fp32\" sets a different dtype for their \
              results; the last match wins",
    },
    Table {
        name: "optimizer.group",
        keys: "scope = \"h.*.mlp.**\", and lr = 1e-4 or weight_decay = 0.0 or both",
        doc: "settings of the parameters whose name or scope matches the pattern; the \
              last match wins",
    },
];

/// `docs/configuration.md`.
pub fn page() -> String {
    let mut out = String::from(PAGE);
    let cell = |text: &str| text.replace('|', "\\|");
    for (section, keys) in sections() {
        let _ = write!(
            out,
            "\n## `[{section}]`\n\n| key | default | value | meaning |\n|---|---|---|---|\n"
        );
        for key in keys {
            let (name, kind, doc) = (key.split().1, key.kind.describe(), key.doc.trim());
            let _ =
                writeln!(out, "| `{name}` | `{}` | {} | {} |", key.default, cell(&kind), cell(doc));
        }
    }
    for table in TABLES {
        let _ = write!(out, "\n## `[[{}]]`\n\n`{}`: {}.\n", table.name, table.keys, table.doc);
    }
    out
}

const PAGE: &str = "# Configuration

A configuration is a TOML file (`frit compile --config train.toml`); `--set section.key=VALUE` overrides single keys. Other keys have
their defaults; `frit compile --help-config` prints this list. The plan directory contains the resolved configuration as
`source/train.toml`.

This page is generated from the declarations in `compiler/src/config/sections.rs` (`UPDATE_EXPECT=1 cargo test -p frit page`).

## Patterns

Keys that take patterns of names (`params.trainable`, `params.frozen`, `params.ignored`, `sharding.wrap`,
`sharding.reshard_after_forward`, `scope` of `[[precision.override]]` and `[[optimizer.group]]`) use the same syntax. A pattern
matches a whole name, whose parts are separated by dots.

| pattern | matches | example |
|---|---|---|
| `*` | any characters of one part | `h.*.ln_*` matches `h.3.ln_1`, not `h.3.mlp.ln_1` |
| `?` | one character of a part | `ln_?` matches `ln_f` |
| `**` | any text over any number of parts | `**bias` matches `bias` and `h.3.fc.bias` |
| `**` as a whole part | any number of parts, including none | `**.bias` matches `bias` and `h.3.fc.bias`; `h.**` matches `h` and `h.3.fc` |
";

/// The text of `--help-config`.
pub fn help() -> String {
    let mut out = String::from("Keys of train.toml and --set key=value, with their defaults:\n");
    for (section, keys) in sections() {
        let _ = write!(out, "\n[{section}]\n");
        for key in keys {
            let (name, default, kind) = (key.split().1, key.default, key.kind.describe());
            let _ = writeln!(out, "  {name} = {default}\n      {}: {kind}", key.phrase());
        }
    }
    for table in TABLES {
        let _ = write!(out, "\n[[{}]]\n  {}\n      {}\n", table.name, table.keys, table.doc);
    }
    out
}
