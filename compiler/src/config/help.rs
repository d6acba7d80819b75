//! The text of `--help-config` and of docs/configuration.md.

use super::keys::sections;
use super::kind::{GROUP_KINDS, INF, Kind};
use std::fmt::Write;

/// A list of tables, whose entries have keys of their own.
pub(super) struct Table {
    pub(super) section: &'static str,
    pub(super) name: &'static str,
    pub(super) fields: &'static [(&'static str, Kind)],
    /// The fields that every entry has.
    pub(super) required: &'static [&'static str],
    /// The fields of which every entry has at least one.
    pub(super) any: &'static [&'static str],
    example: &'static str,
    pub(super) doc: &'static str,
}

pub(super) const TABLES: [Table; 2] = [
    Table {
        section: "precision",
        name: "override",
        fields: &[
            ("scope", Kind::Text),
            ("op", Kind::Text),
            ("dtype", Kind::Float(&[])),
            ("output", Kind::Float(&[])),
        ],
        required: &["dtype"],
        any: &["scope", "op"],
        example: "scope = \"h.*.attn\", op = \"softmax\" or both, and dtype = \"fp32\"",
        doc: "computes matching operations in another dtype; output = \"fp32\" sets a different dtype for their \
              results; the last match wins",
    },
    Table {
        section: "optimizer",
        name: "group",
        fields: &[
            ("scope", Kind::Text),
            ("lr", Kind::Number(0.0, INF)),
            ("weight_decay", Kind::Number(0.0, INF)),
            ("kind", Kind::Choice(GROUP_KINDS)),
        ],
        required: &["scope"],
        any: &["lr", "weight_decay", "kind"],
        example: "scope = \"h.*.mlp.**\", and lr = 1e-4, weight_decay = 0.0, kind = \"adamw\" or several of them",
        doc: "settings of the parameters whose name or scope matches the pattern, and with \
              optimizer.kind = \"muon\" which of its two optimizers steps them; the last match wins",
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
        let Table { section, name, example, doc, .. } = table;
        let _ = write!(out, "\n## `[[{section}.{name}]]`\n\n`{example}`: {doc}.\n");
    }
    out
}

const PAGE: &str = "# Configuration

A configuration is a TOML file (`frit compile --config train.toml`); `--set section.key=VALUE` overrides single keys. Other keys have
their defaults; `frit compile --help-config` prints this list. The plan directory contains the resolved configuration as
`source/train.toml`. Editors that know TOML schemas complete and check the keys with [`train.schema.json`](train.schema.json):
`#:schema PATH/train.schema.json` as the first line.

This page and the schema are generated from the declarations in `compiler/src/config/sections.rs` (`UPDATE_EXPECT=1 cargo test -p frit config`).

## Patterns

Keys that take patterns of names (`params.trainable`, `params.frozen`, `params.ignored`, `adapter.targets`, `sharding.wrap`,
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
        let Table { section, name, example, doc, .. } = table;
        let _ = write!(out, "\n[[{section}.{name}]]\n  {example}\n      {doc}\n");
    }
    out
}
