//! Reads a trace. Every graph is built again, so that its types are those which its operations infer, and verified.

use super::form::{Kind, Nodes, Operation, Outputs, Part, Pass, Trace, VERSION};
use super::tables::Tables;
use super::unpacked;
use frit_ir::ops::{Constant, Fusion};
use frit_ir::{Graph, Op, Origin, OutputKind, Region, Tensor, ValueId, verify};
use frit_passes::adapter;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// A pass, and the graph after it.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Name of the pass.
    pub pass: String,
    /// The graph; that of the stage before if it changed nothing.
    pub graph: Arc<Graph>,
}

/// Reads a trace that begins on this graph: the passes over the model, and those of the evaluation beside a training.
///
/// # Errors
/// Why the file is no such trace, in words.
pub fn read(file: &[u8], imported: &Arc<Graph>) -> Result<(Vec<Stage>, Vec<Stage>), String> {
    let trace = unpacked(file).map_err(|e| format!("it cannot be read: {e}"))?;
    if trace.version != VERSION {
        let version = trace.version;
        return Err(format!("it has version {version}, and this program reads {VERSION}"));
    }
    let (tables, part, digest) = Tables::of_imported(imported);
    if digest != trace.imported {
        return Err("it begins on another graph than the model that is imported now".into());
    }
    let known = Known::new(tables, &trace)?;
    let rows = known.rows(&[], &part)?;
    let outputs = Rc::new(part.outputs.unwrap_or_default());
    let mut at = Point { rows, outputs, graph: imported.clone() };
    let mut adapted = at.clone();
    let mut passes = vec![];
    for pass in trace.passes {
        let name = pass.pass.clone();
        at = known.after(at, pass)?;
        if name == adapter::INFO.name {
            adapted = at.clone();
        }
        passes.push(Stage { pass: name, graph: at.graph.clone() });
    }
    let (mut at, mut evaluation) = (adapted, vec![]);
    for pass in trace.evaluation {
        let name = pass.pass.clone();
        at = known.after(at, pass)?;
        evaluation.push(Stage { pass: name, graph: at.graph.clone() });
    }
    Ok((passes, evaluation))
}

/// A node.
struct Row {
    op: usize,
    origin: usize,
    region: Region,
    /// Number of the first result.
    first: i64,
    /// The name of each result.
    names: Vec<Option<usize>>,
    /// Numbers of the operands.
    operands: Vec<i64>,
}

/// A graph, with the rows and outputs that it is from.
#[derive(Clone)]
struct Point {
    rows: Vec<Rc<Row>>,
    outputs: Rc<Outputs>,
    graph: Arc<Graph>,
}

/// What the rows of a trace refer to.
#[derive(Default)]
struct Known {
    strings: Vec<Arc<str>>,
    origins: Vec<Origin>,
    operations: Vec<Op>,
}

fn lacking<T>(found: Option<T>, what: &str) -> Result<T, String> {
    found.ok_or_else(|| format!("it refers to {what} that it does not have"))
}

impl Known {
    fn new(tables: Tables, trace: &Trace) -> Result<Known, String> {
        let mut known = Known {
            strings: tables.strings.all,
            origins: tables.origins.all,
            operations: tables.operations.all,
        };
        known.strings.extend(trace.strings.iter().map(|text| text.as_str().into()));
        for [source, scope, pass] in &trace.origins {
            let origin = Origin {
                source: known.string(*source)?,
                scope: known.string(*scope)?,
                pass: known.string(*pass)?,
            };
            known.origins.push(origin);
        }
        for operation in &trace.operations {
            let op = known.operation(operation)?;
            known.operations.push(op);
        }
        Ok(known)
    }

    fn string(&self, index: u32) -> Result<Arc<str>, String> {
        lacking(self.strings.get(index as usize).cloned(), "a name")
    }

    fn operation(&self, operation: &Operation) -> Result<Op, String> {
        match operation {
            Operation::Plain(name, attributes) => {
                Op::from_parts(name, attributes.clone()).map_err(|e| e.to_string())
            }
            Operation::Constant(ty, hex) => {
                let fits = |bytes: &Vec<u8>| {
                    let elements = ty.shape.checked_numel();
                    elements.and_then(|n| n.checked_mul(ty.dtype.size())) == Some(bytes.len())
                };
                let bytes = lacking(bytes(hex).filter(fits), "elements")?;
                let value = Tensor::from_bytes(ty.clone(), &bytes).map_err(|e| e.to_string())?;
                Ok(Op::Constant(Constant { value }))
            }
            Operation::Fusion(kind, part) => {
                let rows = self.rows(&[], part)?;
                let is_fusion = |row: &Rc<Row>| matches!(self.operations[row.op], Op::Fusion(_));
                if rows.iter().any(is_fusion) {
                    return Err("a fused region has another within it".into());
                }
                let outputs = lacking(part.outputs.as_ref(), "outputs")?;
                let body = self.graph(&rows, part, outputs)?;
                Ok(Op::Fusion(Box::new(Fusion { kind: *kind, body })))
            }
        }
    }

    /// The graph after a pass.
    fn after(&self, before: Point, pass: Pass) -> Result<Point, String> {
        let Some(mut part) = pass.graph else { return Ok(before) };
        let wrong = |e: String| format!("after pass `{}`: {e}", pass.pass);
        let rows = self.rows(&before.rows, &part).map_err(wrong)?;
        let outputs = part.outputs.take().map_or(before.outputs, Rc::new);
        let graph = self.graph(&rows, &part, &outputs).map_err(wrong)?;
        verify::verify(&graph).map_err(|broken| {
            let first = broken.first().map_or(String::new(), |d| d.message.clone());
            wrong(format!("it is no graph: {first}"))
        })?;
        Ok(Point { rows, outputs, graph: Arc::new(graph) })
    }

    /// The rows of a graph, in order.
    fn rows(&self, before: &[Rc<Row>], part: &Part) -> Result<Vec<Rc<Row>>, String> {
        let mut new = self.new_rows(&part.nodes)?.into_iter();
        let mut rows = vec![];
        let (mut next, mut all) = (0_i64, 0);
        for (added, skipped, kept) in &part.order {
            rows.extend(new.by_ref().take(*added));
            next = next.saturating_add(*skipped);
            let from = usize::try_from(next).ok();
            let found = from.and_then(|from| before.get(from..from.checked_add(*kept)?));
            let found = lacking(found, "nodes")?;
            all += found.len();
            if all > before.len() {
                return Err("it has a node twice".into());
            }
            rows.extend(found.iter().cloned());
            next += found.len() as i64;
        }
        Ok(rows)
    }

    fn new_rows(&self, nodes: &Nodes) -> Result<Vec<Rc<Row>>, String> {
        let mut rows = vec![];
        let (mut names, mut operands) = (nodes.names.iter(), nodes.operands.iter());
        let mut next = 0_i64;
        for (i, (n_results, n_operands)) in nodes.sizes.iter().enumerate() {
            let at = |column: &[u32]| column.get(i).map(|n| *n as usize);
            let is_known = |op: &usize| *op < self.operations.len();
            let skipped = lacking(nodes.results.get(i), "a result")?;
            let first = next.saturating_add(*skipped);
            let first = lacking(u32::try_from(first).ok().map(i64::from), "a result")?;
            let named = |index: &u32| index.checked_sub(1).map(|index| index as usize);
            let row = Row {
                op: lacking(at(&nodes.operations).filter(is_known), "an operation")?,
                origin: lacking(at(&nodes.origins), "an origin")?,
                region: match lacking(nodes.regions.get(i), "a region")? {
                    0 => Region::Forward,
                    1 => Region::Backward,
                    2 => Region::Update,
                    k => Region::Recompute(k - 3),
                },
                first,
                names: names.by_ref().take(*n_results).map(named).collect(),
                operands: operands
                    .by_ref()
                    .take(*n_operands)
                    .map(|less| first.saturating_sub(*less))
                    .collect(),
            };
            next = first.saturating_add(row.names.len() as i64);
            rows.push(Rc::new(row));
        }
        Ok(rows)
    }

    /// A graph of these rows.
    fn graph(&self, rows: &[Rc<Row>], part: &Part, outputs: &Outputs) -> Result<Graph, String> {
        let mut graph = Graph::new(&self.string(part.name)?);
        graph.world_size = part.world_size;
        let mut values: HashMap<i64, ValueId> = HashMap::new();
        let value = |values: &HashMap<i64, ValueId>, number: i64| {
            lacking(values.get(&number).copied(), "a value")
        };
        for row in rows {
            let operands = row.operands.iter().map(|number| value(&values, *number));
            let operands: Vec<ValueId> = operands.collect::<Result<_, _>>()?;
            let origin = lacking(self.origins.get(row.origin), "an origin")?;
            let op = self.operations[row.op].clone();
            let added = graph.add(op, &operands, origin.clone(), row.region);
            let results = added.map_err(|e| e.to_string())?;
            if results.len() != row.names.len() {
                return Err("a node has another number of results than its operation".into());
            }
            for ((result, name), number) in results.into_iter().zip(&row.names).zip(row.first..) {
                if let Some(name) = name {
                    let name = lacking(self.strings.get(*name), "a name")?;
                    graph.set_name(result, name);
                }
                if values.insert(number, result).is_some() {
                    return Err("two nodes have the same result".into());
                }
            }
        }
        let (mut number, mut carried) = (0_i64, outputs.carried.iter());
        for ((name, kind), skipped) in outputs.names.iter().zip(&outputs.kinds).zip(&outputs.values)
        {
            number = number.saturating_add(*skipped);
            let kind = match kind {
                Kind::Result => OutputKind::Result,
                Kind::LossSum => OutputKind::LossSum,
                Kind::LossCount => OutputKind::LossCount,
                Kind::Gradient => OutputKind::Gradient,
                Kind::Metric => OutputKind::Metric,
                Kind::Carry => {
                    let less = lacking(carried.next(), "a carried value")?;
                    OutputKind::Carry(value(&values, number.saturating_sub(*less))?)
                }
            };
            graph.add_output(&self.string(*name)?, value(&values, number)?, kind);
        }
        Ok(graph)
    }
}

/// The bytes that hexadecimal digits stand for.
fn bytes(hex: &str) -> Option<Vec<u8>> {
    let digit = |c: &u8| (*c as char).to_digit(16).map(|n| n as u8);
    let digits: Vec<u8> = hex.as_bytes().iter().map(digit).collect::<Option<_>>()?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair.get(1).copied().unwrap_or(0)).collect())
}
