//! Which parameters are gathered together.

use frit_ir::ops::ParamKind;
use frit_ir::plan::UnitSpec;
use frit_ir::{Graph, Region, Shape, ValueId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// How parameters are grouped into units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrap {
    /// Repeated isomorphic blocks, found without hints; the rest in the root.
    Blocks,
    /// Consecutive parameters, in order of use, of at least this many elements together.
    Size(usize),
    /// One unit.
    None,
}

/// Units, and the unit of every parameter that trains or is frozen.
#[derive(Debug)]
pub struct Assignment {
    /// Unit 0 is the root; the others in order of first use.
    pub units: Vec<UnitSpec>,
    /// In the graph's order.
    pub unit_of: Vec<(ValueId, usize)>,
}

/// Assigns units. Parameters that two units use belong to the root.
pub fn assign(graph: &Graph, wrap: &Wrap) -> Assignment {
    let params = params_by_use(graph);
    let name_of = match wrap {
        Wrap::Blocks => blocks(&params),
        Wrap::Size(size) => by_size(&params, *size),
        Wrap::None => vec![None; params.len()],
    };
    let reason = match wrap {
        Wrap::Blocks => "a repeated block".to_string(),
        Wrap::Size(size) => format!("at least {size} parameters in order of use"),
        Wrap::None => String::new(),
    };
    let root_reason = match wrap {
        Wrap::None => "one unit was asked for",
        _ => "parameters of no other unit, and those that several units use",
    };
    let mut units = vec![UnitSpec { name: "root".into(), reason: root_reason.into() }];
    let mut unit_of: HashMap<ValueId, usize> = HashMap::new();
    for (param, name) in params.iter().zip(name_of) {
        let unit = match name {
            None => 0,
            Some(name) => units.iter().position(|u| u.name == name).unwrap_or_else(|| {
                units.push(UnitSpec { name, reason: reason.clone() });
                units.len() - 1
            }),
        };
        unit_of.insert(param.value, unit);
    }
    let in_order = graph
        .params()
        .filter_map(|(value, _)| unit_of.get(&value).map(|unit| (value, *unit)))
        .collect();
    Assignment { units, unit_of: in_order }
}

struct UsedParam {
    value: ValueId,
    /// Module path, with the parameter's own name last.
    path: Vec<String>,
    shape: Shape,
    /// Scopes of the forward nodes that read it.
    scopes: BTreeSet<String>,
    n_uses: usize,
}

/// Trainable and frozen parameters in the order of their first forward use.
fn params_by_use(graph: &Graph) -> Vec<UsedParam> {
    let position: HashMap<_, _> =
        graph.order().iter().enumerate().map(|(i, id)| (*id, i)).collect();
    let users = graph.users();
    let mut params = Vec::new();
    for (value, param) in graph.params() {
        if param.kind == ParamKind::Buffer {
            continue;
        }
        let forward: Vec<_> = users[value.0 as usize]
            .iter()
            .filter(|n| graph.node(**n).region == Region::Forward)
            .collect();
        let scope = |n: &frit_ir::NodeId| graph.node(*n).origin.scope.to_string();
        let first = forward.iter().map(|n| position[*n]).min().unwrap_or(usize::MAX);
        // Exporters that lose parameter names (`onnx::MatMul_12`) still keep the scope of the use.
        let path = match (param.name.contains('.'), forward.first()) {
            (false, Some(user)) if !scope(user).is_empty() => {
                format!("{}.{}", scope(user), param.name)
            }
            _ => param.name.clone(),
        };
        let used = UsedParam {
            value,
            path: path.split('.').map(str::to_string).collect(),
            shape: param.ty.shape.clone(),
            scopes: forward.iter().map(|n| scope(n)).collect(),
            n_uses: forward.len(),
        };
        params.push((first, used));
    }
    params.sort_by_key(|(first, _)| *first);
    params.into_iter().map(|(_, p)| p).collect()
}

/// A numbered module (`transformer.h.3`) is a block if at least two of its siblings hold parameters of
/// the same names and shapes; of nested ones the outermost counts.
fn blocks(params: &[UsedParam]) -> Vec<Option<String>> {
    type Contents = BTreeSet<(String, Shape)>;
    let mut families: BTreeMap<String, BTreeMap<String, Contents>> = BTreeMap::new();
    for p in params {
        for i in numbered(&p.path) {
            families
                .entry(p.path[..i].join("."))
                .or_default()
                .entry(p.path[i].clone())
                .or_default()
                .insert((p.path[i + 1..].join("."), p.shape.clone()));
        }
    }
    families.retain(|_, members| {
        let mut counts: BTreeMap<&Contents, usize> = BTreeMap::new();
        members.values().for_each(|contents| *counts.entry(contents).or_default() += 1);
        counts.values().any(|n| *n >= 2)
    });
    let block_of = |path: &[String]| {
        numbered(path)
            .find_map(|i| families.contains_key(&path[..i].join(".")).then(|| path[..=i].join(".")))
    };
    params
        .iter()
        .map(|p| {
            let block = block_of(&p.path)?;
            let elsewhere = p.scopes.iter().any(|scope| {
                let path: Vec<String> = scope.split('.').map(str::to_string).collect();
                block_of(&path).is_some_and(|other| other != block)
            });
            (!elsewhere).then_some(block)
        })
        .collect()
}

fn numbered(path: &[String]) -> impl Iterator<Item = usize> + '_ {
    (0..path.len()).filter(|i| path[*i].parse::<u32>().is_ok())
}

fn by_size(params: &[UsedParam], size: usize) -> Vec<Option<String>> {
    let (mut unit, mut filled) = (1, 0);
    params
        .iter()
        .map(|p| {
            if p.n_uses > 1 {
                return None;
            }
            if filled >= size {
                unit += 1;
                filled = 0;
            }
            filled += p.shape.numel();
            Some(format!("part.{unit}"))
        })
        .collect()
}
