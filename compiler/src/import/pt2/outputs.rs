//! Names of the results, from the structure that the module returns.

use serde::Deserialize;
use serde_json::Value;

/// PyTorch's description of a structure.
#[derive(Deserialize)]
struct Spec {
    #[serde(default)]
    r#type: Option<String>,
    #[serde(default)]
    context: Option<String>,
    #[serde(default)]
    children_spec: Vec<Spec>,
}

/// The name of each of `n` results, if it has one: the key of a dict or the field of a structure.
pub(super) fn names(spec: &str, n: usize) -> Vec<Option<String>> {
    let mut found = Vec::new();
    if let Ok((_, spec)) = serde_json::from_str::<(u64, Spec)>(spec) {
        walk(&spec, None, &mut found);
    }
    let mut all: Vec<&String> = found.iter().flatten().collect();
    all.sort_unstable();
    let unique = all.windows(2).all(|w| w[0] != w[1]);
    if found.len() == n && unique { found } else { vec![None; n] }
}

fn walk(spec: &Spec, name: Option<&str>, found: &mut Vec<Option<String>>) {
    if spec.r#type.is_none() {
        found.push(name.map(str::to_string));
        return;
    }
    let keys = spec.context.as_deref().and_then(|c| keys(c, spec.children_spec.len()));
    for (i, child) in spec.children_spec.iter().enumerate() {
        let key = keys.as_ref().map(|k| k[i].as_str());
        let full = match (name, key) {
            (None, None) => None,
            (Some(name), None) => Some(format!("{name}.{i}")),
            (None, Some(key)) => Some(key.to_string()),
            (Some(name), Some(key)) => Some(format!("{name}.{key}")),
        };
        walk(child, full.as_deref(), found);
    }
}

/// The `n` keys in a context: a list of texts, also inside of a list that names the class first.
fn keys(context: &str, n: usize) -> Option<Vec<String>> {
    fn list(value: &Value, n: usize) -> Option<Vec<String>> {
        let entries = value.as_array()?;
        let texts: Option<Vec<String>> =
            entries.iter().map(|e| e.as_str().map(str::to_string)).collect();
        texts.filter(|t| t.len() == n).or_else(|| entries.iter().find_map(|e| list(e, n)))
    }
    list(&serde_json::from_str(context).ok()?, n)
}

#[cfg(test)]
mod tests {
    use super::names;

    #[test]
    fn keys_and_fields_are_names() {
        let leaf = r#"{"type": null, "context": null, "children_spec": []}"#;
        let of = |ty: &str, context: &str, children: &str| {
            format!(
                r#"[1, {{"type": "{ty}", "context": "{context}", "children_spec": [{children}]}}]"#
            )
        };
        let two = format!("{leaf}, {leaf}");
        let some = |list: &[&str]| list.iter().map(|n| Some((*n).to_string())).collect::<Vec<_>>();
        assert_eq!(names(&of("builtins.tuple", "null", &two), 2), [None, None]);
        let dict = of("builtins.dict", r#"[\"loss\", \"logits\"]"#, &two);
        assert_eq!(names(&dict, 2), some(&["loss", "logits"]));
        assert_eq!(names(&dict, 3), [None, None, None]);
        let inner = r#"{"type": "builtins.tuple", "context": "null", "children_spec": ["#;
        let nested =
            of("m.Output", r#"[\"logits\", \"hidden\"]"#, &format!("{leaf}, {inner}{two}]}}"));
        assert_eq!(names(&nested, 3), some(&["logits", "hidden.0", "hidden.1"]));
        assert_eq!(names("damaged", 1), [None]);
    }
}
