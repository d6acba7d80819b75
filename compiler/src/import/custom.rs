//! Calls of functions that name their gradient, for both front ends.
//!
//! A gradient function takes the inputs of its function, then its results, then their gradients, and gives the gradients of those
//! inputs that are floats, in order; later ones may be missing, and one without a name is none.

use frit_ir::ops::CustomGradient;
use frit_ir::{Code, DType, Diagnostic, Graph, Op, Origin, Region, ValueId};

/// One call.
pub(super) struct Call<'a> {
    /// Distinguishes calls; that of an inner call is greater.
    pub(super) number: u32,
    /// The model's name of the function.
    pub(super) function: &'a str,
    /// That of its gradient function.
    pub(super) gradient: &'a str,
}

/// The dtype that a function states to run in.
///
/// # Errors
/// If it is no such dtype.
pub(super) fn precision(word: &str, function: &str) -> Result<DType, Diagnostic> {
    let dtype = word.parse::<DType>().ok();
    dtype.filter(|d| matches!(d, DType::F32 | DType::F16 | DType::BF16)).ok_or_else(|| {
        let message = format!("the function `{function}` states the precision `{word}`");
        Diagnostic::error(Code::FunctionPrecision, message).help("write f32, f16 or bf16")
    })
}

/// That a gradient function takes so many values.
///
/// # Errors
/// If it takes another number than its function's inputs and results ask for.
pub(super) fn takes(
    call: &Call<'_>,
    n: usize,
    [inputs, results]: [usize; 2],
) -> Result<(), String> {
    let expected = inputs + 2 * results;
    if n == expected {
        return Ok(());
    }
    let Call { function, gradient, .. } = call;
    Err(format!(
        "`{gradient}` has {n} inputs, but as the gradient of `{function}` it is given {expected}: \
         {inputs} inputs, {results} results and the gradients of these"
    ))
}

/// The results of a function for readers outside, so that its inputs have these gradients.
///
/// # Errors
/// Gradients that do not fit the inputs.
pub(super) fn wrap(
    graph: &mut Graph,
    origin: &Origin,
    call: &Call<'_>,
    results: &[ValueId],
    inputs: &[Option<ValueId>],
    gradients: &[Option<ValueId>],
) -> Result<Vec<ValueId>, String> {
    let Call { function, gradient, .. } = call;
    let is_float = |graph: &Graph, v: &ValueId| graph.ty(*v).dtype.is_float();
    let slots: Vec<Option<ValueId>> =
        inputs.iter().filter(|x| x.is_none_or(|x| is_float(graph, &x))).copied().collect();
    if gradients.len() > slots.len() {
        let (n, m) = (gradients.len(), slots.len());
        let integers = inputs.len() - m;
        let also = match integers {
            0 => String::new(),
            n => format!(" beside {n} of integers, which have no gradient"),
        };
        return Err(format!(
            "`{gradient}` gives {n} gradients, but `{function}` has {m} inputs of floats{also}"
        ));
    }
    let mut pairs = Vec::new();
    for (i, (x, dx)) in slots.iter().zip(gradients).enumerate() {
        let (Some(x), Some(dx)) = (*x, *dx) else { continue };
        let (x_ty, dx_ty) = (graph.ty(x), graph.ty(dx));
        if !dx_ty.dtype.is_float() || dx_ty.shape != x_ty.shape {
            return Err(format!(
                "result {i} of `{gradient}` is {dx_ty}, but the input of `{function}` that it is the gradient of is {x_ty}"
            ));
        }
        pairs.push((x, dx));
    }
    let floats: Vec<ValueId> = results.iter().filter(|y| is_float(graph, y)).copied().collect();
    if floats.is_empty() {
        return Ok(results.to_vec());
    }
    let op =
        CustomGradient { call: call.number, results: floats.len(), function: call.function.into() };
    let operands: Vec<ValueId> = floats
        .iter()
        .copied()
        .chain(pairs.iter().map(|(x, _)| *x))
        .chain(pairs.iter().map(|(_, dx)| *dx))
        .collect();
    let wrapped = graph.add(Op::CustomGradient(op), &operands, origin.clone(), Region::Forward);
    let mut wrapped = wrapped.map_err(|e| e.error.to_string())?.into_iter();
    let mut of = |y: &ValueId| if is_float(graph, y) { wrapped.next().unwrap_or(*y) } else { *y };
    Ok(results.iter().map(&mut of).collect())
}
