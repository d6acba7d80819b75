//! Writes calls of functions out, those with a gradient or precision of their own between boundaries.

use super::expand::{Carried, Expander, Names, Place};
use super::locate::Path;
use super::schema::{CallDecl, FunctionDecl, Item};
use crate::diagnostics::Report;
use crate::import::custom;
use crate::import::limits::Resource;
use frit_ir::ops::{Constant, Cotangent, EnterPrecision, Expand, LeavePrecision};
use frit_ir::{Code, DType, Diagnostic, Op, Origin, Tensor, TensorType, ValueId, nearest};
use serde_json::{Map, Value};

/// The key of a reference to an attribute of the function.
const REFERENCE: &str = "attr";

/// Attributes with those of the call in place of references, or the name of one that there is not.
pub(super) fn referred(
    attributes: &Map<String, Value>,
    of_call: &Map<String, Value>,
) -> Result<Map<String, Value>, String> {
    let mut out = Map::new();
    for (key, value) in attributes {
        let value = match value {
            Value::Object(object) => match (object.len(), object.get(REFERENCE)) {
                (1, Some(Value::String(name))) => {
                    of_call.get(name).cloned().ok_or_else(|| name.clone())?
                }
                _ => Value::Object(referred(object, of_call)?),
            },
            other => other.clone(),
        };
        out.insert(key.clone(), value);
    }
    Ok(out)
}

impl Expander<'_> {
    /// That no attribute of the function has this name.
    pub(super) fn unknown_attribute(&self, name: &str, place: &Place, path: &Path) -> Diagnostic {
        let message = match place.functions.last() {
            Some(f) => format!("`{}` has no attribute `{name}`", self.functions[*f].name),
            None => format!("`{name}` is an attribute of no function"),
        };
        self.error(path, message)
            .help("a function lists its attributes, with their defaults, in `attrs`")
    }

    /// Adds what a call computes.
    pub(super) fn call(
        &mut self,
        call: &CallDecl,
        place: &Place,
        names: &mut Names,
        block: &mut Carried,
        path: &Path,
    ) -> Result<(), Report> {
        let index = self.function(&call.call, &path.key("call"))?;
        let function = &self.functions[index];
        let given = referred(&call.attrs, &place.attributes)
            .map_err(|unknown| self.unknown_attribute(&unknown, place, &path.key("attrs")))?;
        let mut attributes = function.attrs.clone();
        for (name, value) in given {
            if !function.attrs.contains_key(&name) {
                let of = Place { functions: vec![index], ..Place::default() };
                return Err(self.unknown_attribute(&name, &of, &path.key("attrs")).into());
            }
            attributes.insert(name, value);
        }
        let inputs = self.operands(&call.inputs, names, &path.key("inputs"))?;
        let scope = place.join(call.scope.as_deref());
        let origin = Origin::new(&place.fill(call.id.as_deref().unwrap_or("")), &scope);
        let inner = Place {
            scope,
            indices: Vec::new(),
            attributes,
            functions: place.functions.clone(),
            replaced: place.replaced,
        };
        let results = self.bounded(index, &inputs, &inner, &origin, path)?;
        let path = path.key("outputs");
        self.results(&call.call, &call.outputs, results, names, block, &path)
    }

    /// The function of a name.
    fn function(&self, name: &str, path: &Path) -> Result<usize, Report> {
        self.functions.iter().position(|f| f.name == name).ok_or_else(|| {
            let names = self.functions.iter().map(|f| f.name.as_str());
            let error = self.error(path, format!("there is no function `{name}`"));
            error.help(nearest::advice(name, names)).into()
        })
    }

    /// Results of a function between its boundaries.
    fn bounded(
        &mut self,
        index: usize,
        inputs: &[ValueId],
        place: &Place,
        origin: &Origin,
        path: &Path,
    ) -> Result<Vec<ValueId>, Report> {
        let functions = self.functions;
        let function = &functions[index];
        let declared = Path::default().key("functions").index(index);
        let number = self.calls;
        self.calls += 1;
        let precision = function.precision.as_deref();
        let precision = precision.map(|word| custom::precision(word, &function.name)).transpose();
        let precision = precision.map_err(|mut e| {
            e.message = format!("{}{}", self.source.place(&declared.key("precision")), e.message);
            e
        })?;
        let gradient = match &function.gradient {
            Some(name) if !place.replaced => {
                let path = declared.key("gradient");
                let found = self.function(name, &path).map_err(|mut report| {
                    report
                        .diagnostics
                        .iter_mut()
                        .for_each(|d| d.code = Code::FunctionGradient.id().into());
                    report
                })?;
                Some(found)
            }
            _ => None,
        };
        let entered: Vec<ValueId> = match precision {
            None => inputs.to_vec(),
            Some(dtype) => {
                let enter = Op::EnterPrecision(EnterPrecision { call: number, dtype });
                self.boundaries(&enter, inputs, origin, path)?
            }
        };
        let inner = Place { replaced: place.replaced || gradient.is_some(), ..place.clone() };
        let made = self.body(index, &entered, &inner, path)?;
        let all = |(i, value): (usize, Option<ValueId>)| {
            value.ok_or_else(|| {
                let path = declared.key("outputs").index(i);
                Report::from(self.error(&path, "only a gradient function leaves results out"))
            })
        };
        let mut results = made.into_iter().enumerate().map(all).collect::<Result<Vec<_>, _>>()?;
        if let Some(gradient) = gradient {
            let call = custom::Call {
                number,
                function: &function.name,
                gradient: &functions[gradient].name,
            };
            let misfit = |this: &Self, message: String| {
                let path = Path::default().key("functions").index(gradient);
                let mut error = this.error(&path, message).at(origin);
                error.code = Code::FunctionGradient.id().into();
                error.help("docs/custom-gradients.md says what a gradient function takes and gives")
            };
            custom::takes(&call, functions[gradient].inputs.len(), [inputs.len(), results.len()])
                .map_err(|message| misfit(self, message))?;
            let mut given = [&entered[..], &results].concat();
            for (i, y) in results.iter().enumerate() {
                given.push(self.cotangent(number, i, *y, origin, path)?);
            }
            let known = functions[gradient].attrs.iter();
            let mut attributes = known.map(|(k, v)| (k.clone(), v.clone())).collect::<Map<_, _>>();
            let own =
                place.attributes.iter().filter(|(k, _)| functions[gradient].attrs.contains_key(*k));
            attributes.extend(own.map(|(k, v)| (k.clone(), v.clone())));
            let backward = Place { attributes, ..inner };
            let gradients = self.body(gradient, &given, &backward, path)?;
            let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
            let wrapped =
                custom::wrap(&mut self.graph, origin, &call, &results, &inputs, &gradients);
            results = wrapped.map_err(|message| misfit(self, message))?;
        }
        match precision {
            None => Ok(results),
            Some(_) => {
                let leave = Op::LeavePrecision(LeavePrecision { call: number });
                self.boundaries(&leave, &results, origin, path)
            }
        }
    }

    /// Floats behind a boundary.
    fn boundaries(
        &mut self,
        op: &Op,
        values: &[ValueId],
        origin: &Origin,
        path: &Path,
    ) -> Result<Vec<ValueId>, Report> {
        let mut behind = Vec::with_capacity(values.len());
        for &value in values {
            behind.push(match self.graph.ty(value).dtype.is_float() {
                true => self.add(op.clone(), &[value], origin.clone(), path)?[0],
                false => value,
            });
        }
        Ok(behind)
    }

    /// The gradient of a result; a result of integers has none, and zeros stand for it.
    fn cotangent(
        &mut self,
        call: u32,
        result: usize,
        y: ValueId,
        origin: &Origin,
        path: &Path,
    ) -> Result<ValueId, Report> {
        let ty = self.graph.ty(y).clone();
        if ty.dtype.is_float() {
            let op = Op::Cotangent(Cotangent { call, result });
            return Ok(self.add(op, &[y], origin.clone(), path)?[0]);
        }
        let value = Tensor::splat(TensorType::scalar(DType::F32), 0.0);
        let zero = self.add(Op::Constant(Constant { value }), &[], origin.clone(), path)?;
        let expand = Op::Expand(Expand { shape: ty.shape });
        Ok(self.add(expand, &zero, origin.clone(), path)?[0])
    }

    /// Results of a function's nodes; `None` for one that is called `_`.
    fn body(
        &mut self,
        index: usize,
        inputs: &[ValueId],
        place: &Place,
        path: &Path,
    ) -> Result<Vec<Option<ValueId>>, Report> {
        let functions = self.functions;
        let FunctionDecl { name, inputs: declared, outputs, nodes, .. } = &functions[index];
        let at = Path::default().key("functions").index(index);
        if place.functions.contains(&index) {
            return Err(self.error(path, format!("the function `{name}` calls itself")).into());
        }
        if declared.len() != inputs.len() {
            let (n, m) = (declared.len(), inputs.len());
            let message = format!("the function `{name}` has {n} inputs, but {m} are given");
            return Err(self.error(&path.key("inputs"), message).into());
        }
        let mut place = place.clone();
        place.functions.push(index);
        let depth = self.budget.room(Resource::Depth, place.functions.len() as u64);
        depth.map_err(|exceeded| exceeded.diagnostic(name, &Origin::none()))?;
        // A call counts even if it is of nothing.
        self.charge(Resource::Nodes, 1 + declared.len() + outputs.len(), path)?;
        if let Some(i) = nodes.iter().position(declares_parameters) {
            let error =
                self.error(&at.key("nodes").index(i), "a function has no parameters of its own");
            return Err(error.help("give them to it as inputs").into());
        }
        let mut names = Names::default();
        for (i, (name, value)) in declared.iter().zip(inputs).enumerate() {
            if names.get(name).is_some() {
                let path = at.key("inputs").index(i);
                return Err(self.error(&path, format!("the name `{name}` is used twice")).into());
            }
            names.insert(name, *value);
        }
        self.items(nodes, &place, &mut names, &mut Carried::default(), &at.key("nodes"))?;
        let value = |(i, name): (usize, &String)| match name.as_str() {
            "_" => Ok(None),
            name => {
                let path = at.key("outputs").index(i);
                let unknown = || Report::from(self.unknown_value(name, &names, &path));
                names.get(name).map(Some).ok_or_else(unknown)
            }
        };
        outputs.iter().enumerate().map(value).collect()
    }
}

/// Whether a repeat, or one inside of it, has parameters.
fn declares_parameters(item: &Item) -> bool {
    match item {
        Item::Repeat(repeat) => {
            !repeat.params.is_empty() || repeat.nodes.iter().any(declares_parameters)
        }
        Item::Node(_) | Item::Call(_) => false,
    }
}
