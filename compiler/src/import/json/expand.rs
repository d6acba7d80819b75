//! Expands a JSON model to a graph: binds sizes and unrolls repeats.

use super::Source;
use super::call::referred;
use super::locate::Path;
use super::schema::{FunctionDecl, Item, Model, NodeDecl, ParamDecl, RepeatDecl, Size};
use crate::diagnostics::Report;
use crate::import::dims::{self, DimError, checked_numel};
use crate::import::limits::{Budget, Resource};
use crate::import::{ImportOptions, unknown_binds};
use frit_ir::ops::{Input, Param, ParamKind, random};
use frit_ir::{
    Code, Diagnostic, Graph, Op, Origin, OutputKind, Region, Shape, TensorType, ValueId, pattern,
};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Attributes whose texts are sizes.
const SIZE_ATTRIBUTES: [&str; 6] = ["shape", "sizes", "size", "start", "low", "high"];

/// Operations that only passes make, or that have a place of their own in the format.
const RESERVED: [&str; 28] = [
    "adafactor",
    "all_gather",
    "all_reduce",
    "by_param_group",
    "cotangent",
    "custom_gradient",
    "ema_step",
    "enter_precision",
    "fusion",
    "grad_stats",
    "hyper",
    "input",
    "learning_rate",
    "leave_precision",
    "loss_scale",
    "muon_momentum",
    "muon_step",
    "optimizer_step",
    "param",
    "quantize",
    "reduce_scatter",
    "round_stats",
    "scaled_cast",
    "state",
    "tree_sum",
    "unscale",
    "update_loss_scale",
    "update_step",
];

/// Whether only Frit makes operations of this name.
pub(super) fn is_reserved(op: &str) -> bool {
    op.ends_with("_grad") || op.contains("_grad_") || RESERVED.contains(&op)
}

/// Bytes counted for a copy of a block in addition to its names.
const COPY_BYTES: usize = 256;

/// The model's graph.
pub(super) fn graph(
    model: &Model,
    source: Source<'_>,
    options: &ImportOptions,
) -> Result<Graph, Report> {
    let root = Path::default();
    if model.frit_model != 1 {
        let message = format!(
            "{}version {} is not known",
            source.place(&root.key("frit_model")),
            model.frit_model
        );
        return Err(Diagnostic::error(Code::JsonModelInvalid, message)
            .help("this version of Frit reads version 1")
            .into());
    }
    let mut report = Report::default();
    let mut binds = BTreeMap::new();
    for (name, size) in &model.dims {
        match options.binds.get(name).copied().or(*size) {
            Some(0) => report.push(
                Diagnostic::error(
                    Code::DimensionUnknown,
                    format!(
                        "{}dimension `{name}` is 0, which makes tensors without elements",
                        source.place(&root.key("dims").key(name))
                    ),
                )
                .help(format!("give it a size of at least 1, in the file or with --bind {name}=N")),
            ),
            Some(n) => {
                binds.insert(name.clone(), n);
            }
            None => report.push(
                Diagnostic::error(
                    Code::DimensionUnknown,
                    format!(
                        "{}dimension `{name}` has no size",
                        source.place(&root.key("dims").key(name))
                    ),
                )
                .help(format!("give it one with --bind {name}=N, or in the file")),
            ),
        }
    }
    unknown_binds(options, model.dims.keys().map(String::as_str), &mut report);
    report.or(())?;
    let mut expander = Expander {
        graph: Graph::new(&model.name),
        source,
        options,
        binds,
        names: HashSet::new(),
        numbered: HashSet::new(),
        budget: Budget::new(options.limits),
        functions: &model.functions,
        calls: 0,
    };
    expander.model(model)?;
    Ok(expander.graph)
}

/// Most elements of a constant.
const MAX_CONSTANT: usize = 1 << 24;

/// Names that can be read at some point of the model.
#[derive(Default)]
pub(super) struct Names {
    values: HashMap<String, ValueId>,
    /// What each name stood for before it was made, in order.
    before: Vec<(String, Option<ValueId>)>,
}

impl Names {
    pub(super) fn get(&self, name: &str) -> Option<ValueId> {
        self.values.get(name).copied()
    }

    pub(super) fn insert(&mut self, name: &str, value: ValueId) {
        let before = self.values.insert(name.into(), value);
        self.before.push((name.into(), before));
    }

    /// Forgets what was made since this many were.
    fn forget(&mut self, since: usize) {
        for (name, before) in self.before.drain(since..).rev() {
            match before {
                Some(value) => self.values.insert(name, value),
                None => self.values.remove(&name),
            };
        }
    }
}

/// Names that the block being written out may make anew, and those that it has made.
#[derive(Default)]
pub(super) struct Carried {
    names: HashSet<String>,
    made: HashSet<String>,
    /// Whether the block is a repeat's, not the model itself.
    repeated: bool,
}

pub(super) struct Expander<'a> {
    pub(super) graph: Graph,
    pub(super) source: Source<'a>,
    options: &'a ImportOptions,
    binds: BTreeMap<String, usize>,
    /// Full names of inputs and parameters.
    names: HashSet<String>,
    /// Numbers of draws that the model does not number.
    numbered: HashSet<u64>,
    pub(super) budget: Budget,
    pub(super) functions: &'a [FunctionDecl],
    /// Calls so far.
    pub(super) calls: u32,
}

/// Where in the model a block is written out.
#[derive(Clone, Default)]
pub(super) struct Place {
    pub(super) scope: String,
    /// Names between braces and their numbers.
    pub(super) indices: Vec<(String, usize)>,
    /// The attributes of the call that is written out.
    pub(super) attributes: Map<String, Value>,
    /// The functions around it, from the outermost.
    pub(super) functions: Vec<usize>,
    /// Whether a gradient function takes the place of the gradient here.
    pub(super) replaced: bool,
}

impl Place {
    pub(super) fn fill(&self, text: &str) -> String {
        let mut text = text.to_string();
        for (name, value) in &self.indices {
            text = text.replace(&format!("{{{name}}}"), &value.to_string());
        }
        text
    }

    pub(super) fn join(&self, scope: Option<&str>) -> String {
        match scope.map(|s| self.fill(s)) {
            None => self.scope.clone(),
            Some(scope) if self.scope.is_empty() => scope,
            Some(scope) if scope.is_empty() => self.scope.clone(),
            Some(scope) => format!("{}.{scope}", self.scope),
        }
    }
}

impl Expander<'_> {
    pub(super) fn error(&self, path: &Path, message: impl std::fmt::Display) -> Diagnostic {
        Diagnostic::error(Code::JsonModelInvalid, format!("{}{message}", self.source.place(path)))
    }

    /// Counts elements or nodes before they are created.
    pub(super) fn charge(
        &mut self,
        resource: Resource,
        amount: usize,
        path: &Path,
    ) -> Result<(), Report> {
        self.budget.charge(resource, amount as u64).map_err(|exceeded| {
            let place = self.source.place(path);
            let subject = place.trim_end_matches([':', ' ']);
            exceeded.diagnostic(subject, &Origin::none()).into()
        })
    }

    fn size_of(&self, text: &str, path: &Path) -> Result<usize, Report> {
        dims::evaluate(text, &self.binds, &mut BTreeSet::new()).map_err(|e| {
            let error = self.error(path, &e);
            match e {
                DimError::Unbound(name) => error.help(format!("add `{name}` to `dims`")).into(),
                _ => error.into(),
            }
        })
    }

    fn size(&self, size: &Size, path: &Path) -> Result<usize, Report> {
        match size {
            Size::Number(n) => Ok(*n),
            Size::Expression(text) => self.size_of(text, path),
        }
    }

    fn shape(&self, shape: &[Size], path: &Path) -> Result<Shape, Report> {
        let sizes = shape.iter().enumerate().map(|(i, s)| self.size(s, &path.index(i)));
        let dims = sizes.collect::<Result<Vec<_>, _>>()?;
        match checked_numel(&dims) {
            Some(_) => Ok(Shape(dims)),
            None => Err(self.error(path, format!("shape {dims:?} is too large")).into()),
        }
    }

    fn model(&mut self, model: &Model) -> Result<(), Report> {
        let root = Path::default();
        let mut functions = HashSet::new();
        for (i, function) in model.functions.iter().enumerate() {
            if !functions.insert(&function.name) {
                let message = format!("two functions are named `{}`", function.name);
                return Err(self
                    .error(&root.key("functions").index(i).key("name"), message)
                    .into());
            }
        }
        let mut names = Names::default();
        for (i, input) in model.inputs.iter().enumerate() {
            let path = root.key("inputs").index(i);
            let shape = self.shape(&input.shape, &path.key("shape"))?;
            let ty = TensorType::new(input.dtype.dtype(), shape);
            let op = Op::Input(Input { name: input.name.clone(), ty });
            self.leaf(op, &input.name, &input.name, &mut names, &path.key("name"))?;
        }
        let place = Place::default();
        self.params(&model.params, &place, &mut names, &root.key("params"))?;
        self.items(&model.nodes, &place, &mut names, &mut Carried::default(), &root.key("nodes"))?;
        for (i, name) in model.outputs.iter().enumerate() {
            let path = root.key("outputs").index(i);
            let value = names.get(name).ok_or_else(|| self.unknown_value(name, &names, &path))?;
            self.graph.add_output(name, value, OutputKind::Result);
        }
        if model.outputs.is_empty() {
            return Err(self.error(&root.key("outputs"), "the model returns nothing").into());
        }
        self.graph.remove_dead();
        Ok(())
    }

    fn leaf(
        &mut self,
        op: Op,
        full: &str,
        local: &str,
        names: &mut Names,
        path: &Path,
    ) -> Result<(), Report> {
        if !self.names.insert(full.into()) {
            return Err(self.error(path, format!("the name `{full}` is used twice")).into());
        }
        let value = self.graph.add1(op, &[], Origin::none(), Region::Forward);
        let value = value.map_err(|e| self.error(path, e))?;
        self.graph.set_name(value, full);
        names.insert(local, value);
        Ok(())
    }

    fn params(
        &mut self,
        params: &[ParamDecl],
        place: &Place,
        names: &mut Names,
        path: &Path,
    ) -> Result<(), Report> {
        for (i, decl) in params.iter().enumerate() {
            let path = path.index(i);
            let name = place.join(Some(&decl.name));
            self.charge(Resource::Nodes, 1, &path)?;
            self.charge(Resource::Bytes, name.len(), &path)?;
            let shape = self.shape(&decl.shape, &path.key("shape"))?;
            let ty = TensorType::new(decl.dtype.dtype(), shape);
            let (kind, reason) = self.kind(&name, decl);
            if !ty.dtype.is_float() && kind != ParamKind::Buffer {
                let message = format!("a parameter of type {} cannot train", ty.dtype);
                return Err(self
                    .error(&path.key("dtype"), message)
                    .help("use a `constant`")
                    .into());
            }
            let (held, unit, sharded, init) = (None, None, false, decl.init.init());
            let reason = format!("{reason}.");
            let param = Param { name: name.clone(), ty, kind, reason, init, held, unit, sharded };
            self.leaf(Op::Param(param), &name, &decl.name, names, &path.key("name"))?;
        }
        Ok(())
    }

    fn kind(&self, name: &str, decl: &ParamDecl) -> (ParamKind, &'static str) {
        if pattern::any(&self.options.ignored, name) {
            (ParamKind::Buffer, "`params.ignored` matches its name")
        } else if pattern::any(&self.options.frozen, name) {
            (ParamKind::Frozen, "`params.frozen` matches its name")
        } else if !decl.trainable {
            (ParamKind::Frozen, "the model says `trainable: false`")
        } else if !pattern::any(&self.options.trainable, name) {
            (ParamKind::Frozen, "`params.trainable` does not match its name")
        } else {
            (ParamKind::Trainable, "the model lists it as a parameter")
        }
    }

    /// Adds the items of a block.
    pub(super) fn items(
        &mut self,
        items: &[Item],
        place: &Place,
        names: &mut Names,
        block: &mut Carried,
        path: &Path,
    ) -> Result<(), Report> {
        for (i, item) in items.iter().enumerate() {
            let path = path.index(i);
            match item {
                Item::Node(node) => self.node(node, place, names, block, &path)?,
                Item::Call(call) => self.call(call, place, names, block, &path)?,
                Item::Repeat(repeat) => self.repeat(repeat, place, names, block, &path)?,
            }
        }
        Ok(())
    }

    fn node(
        &mut self,
        node: &NodeDecl,
        place: &Place,
        names: &mut Names,
        block: &mut Carried,
        path: &Path,
    ) -> Result<(), Report> {
        if is_reserved(&node.op) {
            let message = format!("the operation `{}` is reserved for Frit", node.op);
            return Err(self.error(&path.key("op"), message).into());
        }
        let attrs = referred(&node.attrs, &place.attributes)
            .map_err(|unknown| self.unknown_attribute(&unknown, place, &path.key("attrs")))?;
        let mut attrs = self.attributes(&attrs, &path.key("attrs"))?;
        let draws = matches!(node.op.as_str(), "random" | "random_mask");
        match attrs.get("id").filter(|_| draws).map(Value::as_u64) {
            Some(Some(id)) if self.numbered.contains(&id) => {
                let message = format!("{id} is the number of draws before, which state none");
                let error = self.error(&path.key("attrs").key("id"), message);
                return Err(error.help("number all draws, or none").into());
            }
            None if draws => {
                let id = random::next_id(&self.graph);
                self.numbered.insert(id.into());
                attrs.insert("id".into(), id.into());
            }
            _ => {}
        }
        if node.op == "constant" {
            let elements = self.constant_size(&attrs, path)?;
            self.charge(Resource::Elements, elements, path)?;
        }
        let known = Op::names().contains(&node.op.as_str());
        let at = path.key(if known && !node.attrs.is_empty() { "attrs" } else { "op" });
        let op = Op::from_parts(&node.op, attrs).map_err(|e| {
            self.error(&at, e).help("docs/json-model.md lists operations and attributes")
        })?;
        let mut operands = self.operands(&node.inputs, names, &path.key("inputs"))?;
        if draws && operands.is_empty() {
            let state = random::generator(&mut self.graph, &Origin::none());
            operands.push(state.map_err(|e| self.error(path, e.error.to_string()))?);
        }
        let source = place.fill(node.id.as_deref().unwrap_or(""));
        let scope = place.join(node.scope.as_deref());
        let names_len: usize = node.outputs.iter().map(String::len).sum();
        self.charge(Resource::Nodes, 1, path)?;
        self.charge(Resource::Bytes, source.len() + scope.len() + names_len, path)?;
        let origin = Origin::new(&source, &scope);
        let results = self.add(op, &operands, origin, path)?;
        self.results(&node.op, &node.outputs, results, names, block, &path.key("outputs"))
    }

    /// The values of some names.
    pub(super) fn operands(
        &self,
        given: &[String],
        names: &Names,
        path: &Path,
    ) -> Result<Vec<ValueId>, Report> {
        let value = |(i, name): (usize, &String)| {
            let unknown = || self.unknown_value(name, names, &path.index(i)).into();
            names.get(name).ok_or_else(unknown)
        };
        given.iter().enumerate().map(value).collect()
    }

    /// Gives the results of an operation or function their names.
    pub(super) fn results(
        &mut self,
        of: &str,
        given: &[String],
        results: Vec<ValueId>,
        names: &mut Names,
        block: &mut Carried,
        path: &Path,
    ) -> Result<(), Report> {
        if results.len() != given.len() {
            let (n, m) = (results.len(), given.len());
            let message = format!("`{of}` has {n} results, but {m} names are given");
            let help = "name every result; use `_` for a result that is not read";
            return Err(self.error(path, message).help(help).into());
        }
        for (i, (name, value)) in given.iter().zip(results).enumerate() {
            if name == "_" {
                continue;
            }
            self.define(name, value, names, block, &path.index(i))?;
            if !self.graph.def(value).op.is_leaf() {
                self.graph.set_name(value, name);
            }
        }
        Ok(())
    }

    pub(super) fn add(
        &mut self,
        op: Op,
        operands: &[ValueId],
        origin: Origin,
        path: &Path,
    ) -> Result<Vec<ValueId>, Report> {
        let types: Vec<&TensorType> = operands.iter().map(|v| self.graph.ty(*v)).collect();
        let name = op.name();
        let misfit = |this: &Self, message: String| {
            let mut error = this.error(path, format!("{name}: {message}")).at(&origin);
            error.code = Code::OperandMismatch.id().into();
            for (i, v) in operands.iter().enumerate() {
                error = error.note(format!("input {i}  {}", this.graph.ty(*v)));
            }
            error
        };
        let results = op.infer(&types).map_err(|e| misfit(self, e.to_string()))?;
        if results.iter().any(|t| checked_numel(t.shape.dims()).is_none()) {
            return Err(misfit(self, "a result is too large".into()).into());
        }
        let added = self.graph.add(op, operands, origin.clone(), Region::Forward);
        added.map_err(|e| misfit(self, e.error.to_string()).into())
    }

    fn define(
        &self,
        name: &str,
        value: ValueId,
        names: &mut Names,
        block: &mut Carried,
        path: &Path,
    ) -> Result<(), Report> {
        block.made.insert(name.into());
        if !block.names.contains(name) && names.get(name).is_some() {
            return Err(self
                .error(path, format!("the name `{name}` is used twice"))
                .help("inside a repeat, only names in `carry` may be redefined")
                .into());
        }
        names.insert(name, value);
        Ok(())
    }

    fn repeat(
        &mut self,
        repeat: &RepeatDecl,
        place: &Place,
        names: &mut Names,
        block: &mut Carried,
        path: &Path,
    ) -> Result<(), Report> {
        let n = self.size(&repeat.repeat, &path.key("repeat"))?;
        self.carried(repeat, names, path)?;
        for (i, name) in repeat.carry.iter().enumerate() {
            if block.repeated && !block.names.contains(name) && !block.made.contains(name) {
                let message = format!("the enclosing repeat does not carry `{name}`");
                let error = self.error(&path.key("carry").index(i), message);
                return Err(error.help("add it to that `carry` too").into());
            }
        }
        let index = repeat.index.clone().unwrap_or_else(|| "i".into());
        for i in 0..n {
            let mut inner = place.clone();
            inner.indices.retain(|(name, _)| *name != index);
            inner.indices.push((index.clone(), i));
            inner.scope = inner.join(repeat.scope.as_deref());
            self.charge(Resource::Bytes, COPY_BYTES + inner.scope.len(), path)?;
            let outside = names.before.len();
            let entered = self.carried(repeat, names, path)?;
            let mut carried = Carried {
                names: repeat.carry.iter().cloned().collect(),
                made: HashSet::new(),
                repeated: true,
            };
            self.block_params(repeat, &inner, names, path)?;
            self.items(&repeat.nodes, &inner, names, &mut carried, &path.key("nodes"))?;
            let left = self.carried(repeat, names, path)?;
            names.forget(outside);
            for (c, name) in repeat.carry.iter().enumerate() {
                if !carried.made.contains(name) {
                    let message = format!("the block does not redefine the carried value `{name}`");
                    return Err(self.error(&path.key("carry").index(c), message).into());
                }
                let (before, after) = (entered[c], left[c]);
                if self.graph.ty(before) != self.graph.ty(after) {
                    let message = format!(
                        "the carried value `{name}` is {} on entry and {} at the end",
                        self.graph.ty(before),
                        self.graph.ty(after)
                    );
                    return Err(self.error(&path.key("carry").index(c), message).into());
                }
                names.insert(name, after);
            }
        }
        // For the enclosing block, the repeat has defined the values it carries.
        if n > 0 {
            block.made.extend(repeat.carry.iter().cloned());
        }
        Ok(())
    }

    /// The values of a repeat's carried names.
    fn carried(
        &self,
        repeat: &RepeatDecl,
        names: &Names,
        path: &Path,
    ) -> Result<Vec<ValueId>, Report> {
        self.operands(&repeat.carry, names, &path.key("carry"))
    }

    fn block_params(
        &mut self,
        block: &RepeatDecl,
        place: &Place,
        names: &mut Names,
        path: &Path,
    ) -> Result<(), Report> {
        for (i, param) in block.params.iter().enumerate() {
            if names.get(&param.name).is_some() {
                let path = path.key("params").index(i).key("name");
                return Err(self
                    .error(&path, format!("the name `{}` is used twice", param.name))
                    .into());
            }
        }
        self.params(&block.params, place, names, &path.key("params"))
    }

    /// The elements of a constant; refuses more than a text should make.
    fn constant_size(&self, attrs: &Map<String, Value>, path: &Path) -> Result<usize, Report> {
        let shape = attrs.get("ty").and_then(|ty| ty.get("shape"));
        let dims: Vec<usize> = shape
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok()))
            .collect();
        checked_numel(&dims).filter(|n| *n <= MAX_CONSTANT).ok_or_else(|| {
            let error = self.error(&path.key("attrs"), "the constant is too large");
            error.help("define a scalar and `expand` it").into()
        })
    }

    pub(super) fn unknown_value(&self, name: &str, names: &Names, path: &Path) -> Diagnostic {
        let error = self.error(path, format!("there is no value `{name}` here"));
        let like = |n: &&String| n.eq_ignore_ascii_case(name) || n.ends_with(&format!(".{name}"));
        match names.values.keys().filter(like).min() {
            Some(near) => error.help(format!("did you mean `{near}`?")),
            None => error.help("values must be defined before they are read"),
        }
    }

    /// The attributes with sizes put in for their names.
    fn attributes(
        &self,
        attributes: &Map<String, Value>,
        path: &Path,
    ) -> Result<Map<String, Value>, Report> {
        let mut out = Map::new();
        for (key, value) in attributes {
            let path = path.key(key);
            let value = match value {
                Value::Object(object) => Value::Object(self.attributes(object, &path)?),
                Value::Array(list) if SIZE_ATTRIBUTES.contains(&key.as_str()) => {
                    let mut sizes = Vec::with_capacity(list.len());
                    for (i, entry) in list.iter().enumerate() {
                        let path = path.index(i);
                        let size = match entry {
                            Value::String(text) => self.size_of(text, &path)?,
                            other => match other.as_u64().and_then(|n| usize::try_from(n).ok()) {
                                Some(n) => n,
                                None => {
                                    return Err(self
                                        .error(&path, format!("{other} is not a size"))
                                        .into());
                                }
                            },
                        };
                        sizes.push(size);
                    }
                    if key == "shape" && checked_numel(&sizes).is_none() {
                        return Err(self.error(&path, "the sizes are too large").into());
                    }
                    Value::from(sizes)
                }
                other => other.clone(),
            };
            out.insert(key.clone(), value);
        }
        Ok(out)
    }
}
