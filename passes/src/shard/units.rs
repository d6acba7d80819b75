//! Groups parameters into units.

use crate::pass::PassContext;
use frit_ir::ops::ParamKind;
use frit_ir::pattern;
use frit_ir::plan::{TiVec, UnitId, UnitSpec};
use frit_ir::{Code, Diagnostic, Graph, Region, Shape, ValueId, nearest};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// How parameters are grouped into units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrap {
    /// Repeated isomorphic blocks, found without hints; the rest in the root.
    Blocks,
    /// Consecutive parameters, in order of use, of at least this many elements in total.
    Size(usize),
    /// The modules that these patterns cover, the innermost where they are nested; the rest in the root.
    Scopes(Vec<String>),
    /// One unit.
    None,
}

/// Units, and the unit of every parameter that trains or is frozen.
#[derive(Debug)]
pub struct Assignment {
    /// The root, and the others in order of first use.
    pub units: TiVec<UnitId, UnitSpec>,
    /// In the graph's order.
    pub unit_of: Vec<(ValueId, UnitId)>,
    /// Why each parameter is where it is, by its name, in the graph's order.
    pub reasons: Vec<(String, String)>,
}

/// The unit of a parameter, and the reason.
struct Choice {
    /// The unit's name; `None` is the root.
    unit: Option<String>,
    reason: String,
}

impl Choice {
    fn root(reason: impl Into<String>) -> Choice {
        Choice { unit: None, reason: reason.into() }
    }
}

/// Assigns units. Parameters that two units use belong to the root.
///
/// # Errors
/// A pattern that matches no module with parameters.
pub fn assign(graph: &Graph, wrap: &Wrap) -> Result<Assignment, Diagnostic> {
    let params = params_by_use(graph);
    let choices = match wrap {
        Wrap::Blocks => blocks(&params),
        Wrap::Size(size) => by_size(&params, *size),
        Wrap::Scopes(patterns) => by_scope(&params, patterns)?,
        Wrap::None => params.iter().map(|_| Choice::root("one unit was requested")).collect(),
    };
    let reason = match wrap {
        Wrap::Blocks => "a repeated block".to_string(),
        Wrap::Size(size) => format!("at least {size} parameters in order of use"),
        Wrap::Scopes(_) => "a module that a pattern matches".to_string(),
        Wrap::None => String::new(),
    };
    let root_reason = match wrap {
        Wrap::None => "one unit was requested",
        _ => "parameters of no other unit, and those that several units use",
    };
    let root = UnitSpec { name: "root".into(), reason: root_reason.into(), reshard: None };
    let mut units: TiVec<UnitId, UnitSpec> = vec![root].into();
    let mut of: HashMap<ValueId, (UnitId, String)> = HashMap::new();
    for (param, choice) in params.iter().zip(choices) {
        let unit = match choice.unit {
            None => UnitId::ROOT,
            Some(name) => units.position(|u| u.name == name).unwrap_or_else(|| {
                units.push_and_get_key(UnitSpec { name, reason: reason.clone(), reshard: None })
            }),
        };
        of.insert(param.value, (unit, choice.reason));
    }
    let (mut unit_of, mut reasons) = (Vec::new(), Vec::new());
    for (value, param) in graph.params() {
        let Some((unit, reason)) = of.remove(&value) else { continue };
        reasons.push((param.name.clone(), format!("in unit `{}`: {reason}", units[unit].name)));
        unit_of.push((value, unit));
    }
    Ok(Assignment { units, unit_of, reasons })
}

/// The units that an earlier run found for the same model. Parameters unknown to it have none.
pub fn known(graph: &Graph, context: &PassContext) -> Assignment {
    let unit_of = graph
        .params()
        .filter_map(|(value, p)| context.unit_of.get(&p.name).map(|unit| (value, *unit)))
        .collect();
    Assignment { units: context.units.clone(), unit_of, reasons: vec![] }
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

/// A numbered module (`transformer.h.3`) is a block if at least two of its siblings hold, for the most part,
/// parameters of the same names and shapes (the first of T5's has one more); of nested ones the outermost
/// counts.
fn blocks(params: &[UsedParam]) -> Vec<Choice> {
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
        let all: Vec<&Contents> = members.values().collect();
        let alike = |(i, a): (usize, &&Contents)| {
            all[..i].iter().any(|b| 2 * a.intersection(b).count() > a.len().max(b.len()))
        };
        all.iter().enumerate().any(alike)
    });
    let block_of = |path: &[String]| {
        numbered(path)
            .find_map(|i| families.contains_key(&path[..i].join(".")).then(|| path[..=i].join(".")))
    };
    params
        .iter()
        .map(|p| {
            let Some(block) = block_of(&p.path) else {
                return Choice::root("its module is not a repeated block");
            };
            let other = p.scopes.iter().find_map(|scope| {
                let path: Vec<String> = scope.split('.').map(str::to_string).collect();
                block_of(&path).filter(|other| *other != block)
            });
            match other {
                Some(other) => Choice::root(format!("used by `{block}` and by `{other}`")),
                None => {
                    Choice { reason: format!("of the repeated block `{block}`"), unit: Some(block) }
                }
            }
        })
        .collect()
}

/// The innermost module of the parameter that matches a pattern, if it contains all uses.
fn by_scope(params: &[UsedParam], patterns: &[String]) -> Result<Vec<Choice>, Diagnostic> {
    let covering = |path: &str| -> Option<(String, &String)> {
        // The module itself first, then what it is in.
        let ends = path.match_indices('.').map(|(i, _)| i).chain([path.len()]);
        let mut ends: Vec<usize> = ends.filter(|end| *end > 0).collect();
        ends.reverse();
        ends.into_iter().find_map(|end| {
            let pattern = patterns.iter().find(|p| pattern::matches(p, &path[..end]))?;
            Some((path[..end].to_string(), pattern))
        })
    };
    let mut covered: BTreeSet<&String> = BTreeSet::new();
    let mut choices = Vec::new();
    for p in params {
        let module = p.path[..p.path.len() - 1].join(".");
        let Some((unit, pattern)) = covering(&module) else {
            choices.push(Choice::root("no pattern matches its module"));
            continue;
        };
        covered.insert(pattern);
        let uses: Vec<Option<String>> =
            p.scopes.iter().map(|s| covering(s).map(|(unit, _)| unit)).collect();
        let here = uses.iter().any(|u| u.as_ref() == Some(&unit));
        let elsewhere = uses.iter().find(|u| match u {
            Some(other) => *other != unit,
            None => here,
        });
        choices.push(match elsewhere {
            Some(other) => {
                let other = other.as_deref().unwrap_or("root");
                Choice::root(format!("used by `{unit}` and by `{other}`"))
            }
            None => Choice { reason: format!("`{pattern}` matches `{unit}`"), unit: Some(unit) },
        });
    }
    match patterns.iter().find(|p| !covered.contains(p)) {
        None => Ok(choices),
        Some(pattern) => {
            let what = format!(
                "`{pattern}` in sharding.wrap matches no module with parameters of its own"
            );
            let modules: BTreeSet<String> =
                params.iter().map(|p| p.path[..p.path.len() - 1].join(".")).collect();
            let some: Vec<String> = modules.iter().take(12).cloned().collect();
            Err(Diagnostic::error(Code::ShardingPattern, what)
                .note(format!("modules with parameters are {} …", some.join(", ")))
                .note(nearest::advice(pattern, modules.iter().map(String::as_str)))
                .help("use `blocks`, `none`, `size=N`, or patterns such as `transformer.h.*, lm_head`"))
        }
    }
}

fn numbered(path: &[String]) -> impl Iterator<Item = usize> + '_ {
    (0..path.len()).filter(|i| path[*i].parse::<u32>().is_ok())
}

fn by_size(params: &[UsedParam], size: usize) -> Vec<Choice> {
    let (mut unit, mut filled) = (1, 0);
    params
        .iter()
        .map(|p| {
            if p.n_uses > 1 {
                return Choice::root(format!("used {} times", p.n_uses));
            }
            if filled >= size {
                unit += 1;
                filled = 0;
            }
            filled += p.shape.numel();
            let from = filled - p.shape.numel();
            let reason = format!("elements {from}..{filled} of it in order of use");
            Choice { unit: Some(format!("part.{unit}")), reason }
        })
        .collect()
}
