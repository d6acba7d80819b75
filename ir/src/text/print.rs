//! Printing. Names are taken from the model, made legal, and made unique by a suffix.

use crate::{Graph, Node, Op, Origin, OutputKind, Region, ValueId};
use std::collections::{HashMap, HashSet};
use std::fmt::{self, Write};

/// Writes the text form of a graph.
pub(crate) fn print(graph: &Graph, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    print_graph(graph, f, "")
}

fn print_graph(graph: &Graph, f: &mut dyn Write, indent: &str) -> fmt::Result {
    let names = names(graph);
    writeln!(f, "graph @{} world={} {{", legal(&graph.name), graph.world_size)?;
    for (_, node) in graph.nodes() {
        write!(f, "{indent}  ")?;
        print_node(graph, node, &names, f, indent)?;
        writeln!(f)?;
    }
    for output in &graph.outputs {
        let name = serde_json::Value::String(output.name.clone());
        write!(f, "{indent}  return %{} as {name}", names[&output.value])?;
        match output.kind {
            OutputKind::Result => {}
            OutputKind::LossSum => write!(f, " loss_sum")?,
            OutputKind::LossCount => write!(f, " loss_count")?,
            OutputKind::Gradient => write!(f, " gradient")?,
            OutputKind::Metric => write!(f, " metric")?,
            OutputKind::Carry(state) => write!(f, " carry %{}", names[&state])?,
        }
        writeln!(f)?;
    }
    write!(f, "{indent}}}")?;
    if indent.is_empty() { writeln!(f) } else { Ok(()) }
}

fn print_node(
    graph: &Graph,
    node: &Node,
    names: &HashMap<ValueId, String>,
    f: &mut dyn Write,
    indent: &str,
) -> fmt::Result {
    for (i, output) in node.outputs.iter().enumerate() {
        let comma = if i > 0 { ", " } else { "" };
        write!(f, "{comma}%{}: {}", names[output], graph.ty(*output))?;
    }
    let (name, attributes) = node.op.to_parts();
    write!(f, " = {name}")?;
    for (i, input) in node.inputs.iter().enumerate() {
        let comma = if i > 0 { "," } else { "" };
        write!(f, "{comma} %{}", names[input])?;
    }
    if !attributes.is_empty() {
        let mut keys: Vec<_> = attributes.iter().collect();
        keys.sort_by_key(|(k, _)| k.as_str());
        let text: Vec<String> = keys.iter().map(|(k, v)| format!("{k} = {v}")).collect();
        write!(f, " {{{}}}", text.join(", "))?;
    }
    if let Op::Fusion(fusion) = &node.op {
        write!(f, " body ")?;
        print_graph(&fusion.body, f, &format!("{indent}  "))?;
    }
    if node.region != Region::Forward {
        write!(f, " @{}", node.region)?;
    }
    if node.origin != Origin::none() {
        let quote = |s: &str| serde_json::Value::String(s.into()).to_string();
        let o = &node.origin;
        write!(f, " loc({}, {}, {})", quote(&o.source), quote(&o.scope), quote(&o.pass))?;
    }
    Ok(())
}

fn names(graph: &Graph) -> HashMap<ValueId, String> {
    let mut used = HashSet::new();
    let mut names = HashMap::new();
    let mut next = 0;
    for (_, node) in graph.nodes() {
        for &output in &node.outputs {
            let base = match &graph.value(output).name {
                Some(name) => legal(name),
                None => {
                    next += 1;
                    (next - 1).to_string()
                }
            };
            let mut name = base.clone();
            let mut suffix = 1;
            while !used.insert(name.clone()) {
                name = format!("{base}_{suffix}");
                suffix += 1;
            }
            names.insert(output, name);
        }
    }
    names
}

fn legal(name: &str) -> String {
    let ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '$' | '-');
    let name: String = name.chars().map(|c| if ok(c) { c } else { '_' }).collect();
    // A bare number would be read as one of the numbers of unnamed values.
    if name.bytes().all(|b| b.is_ascii_digit()) { format!("_{name}") } else { name }
}
