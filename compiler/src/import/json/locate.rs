//! Maps between paths and positions in a JSON text.
//!
//! The text is scanned only to report an error, so parsing keeps no positions.

use std::fmt;

/// One step into a JSON value.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    Index(usize),
}

/// A path such as `nodes[3].inputs[0]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Path(Vec<Step>);

impl Path {
    pub(super) fn key(&self, key: &str) -> Path {
        let mut path = self.clone();
        path.0.push(Step::Key(key.into()));
        path
    }

    pub(super) fn index(&self, index: usize) -> Path {
        let mut path = self.clone();
        path.0.push(Step::Index(index));
        path
    }

    pub(super) fn is_root(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.0.iter().enumerate() {
            match step {
                Step::Key(key) if i == 0 => f.write_str(key)?,
                Step::Key(key) => write!(f, ".{key}")?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

/// Line and column, from 1, of the value at a path; of the innermost value on the way to it if the
/// path ends before.
pub(super) fn position(text: &str, path: &Path) -> (usize, usize) {
    let mut best = None;
    scan(text, |at, start, _| {
        if path.0.starts_with(at) && best.is_none_or(|(depth, _)| at.len() > depth) {
            best = Some((at.len(), start));
        }
    });
    let before = best.and_then(|(_, start)| text.get(..start)).unwrap_or("");
    let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
    (before.matches('\n').count() + 1, column)
}

/// The path of the innermost value at a line and column (in bytes, from 1, as serde counts).
pub(super) fn path_at(text: &str, line: usize, column: usize) -> Path {
    let start: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    let offset = start + column.saturating_sub(1);
    let mut best = Path::default();
    scan(text, |at, start, end| {
        if start <= offset && offset <= end && (at.len() > best.0.len() || best.is_root()) {
            best = Path(at.to_vec());
        }
    });
    best
}

/// An array or object that is still open.
struct Open {
    start: usize,
    object: bool,
    index: usize,
}

/// Visits every value with its path and byte range, containers after what they hold. A text that is
/// not JSON is followed as far as it goes; containers that it does not close end with it.
fn scan(text: &str, mut visit: impl FnMut(&[Step], usize, usize)) {
    let bytes = text.as_bytes();
    let mut path: Vec<Step> = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    // Whether the next string is a key.
    let mut key_next = false;
    let mut i = 0;
    while let Some(&byte) = bytes.get(i) {
        match byte {
            b'{' | b'[' => {
                let object = byte == b'{';
                open.push(Open { start: i, object, index: 0 });
                path.push(if object { Step::Key(String::new()) } else { Step::Index(0) });
                key_next = object;
                i += 1;
            }
            b'}' | b']' => {
                path.pop();
                i += 1;
                if let Some(container) = open.pop() {
                    visit(&path, container.start, i);
                }
                key_next = false;
            }
            b',' => {
                i += 1;
                if let Some(container) = open.last_mut() {
                    container.index += 1;
                    key_next = container.object;
                    if let (false, Some(step)) = (container.object, path.last_mut()) {
                        *step = Step::Index(container.index);
                    }
                }
            }
            b'"' => {
                let end = string_end(bytes, i);
                if key_next {
                    let key = serde_json::from_str(&text[i..end]).unwrap_or_default();
                    if let Some(step) = path.last_mut() {
                        *step = Step::Key(key);
                    }
                    key_next = false;
                } else {
                    visit(&path, i, end);
                }
                i = end;
            }
            b':' | b' ' | b'\t' | b'\r' | b'\n' => i += 1,
            _ => {
                let rest = &bytes[i..];
                let stop = |b: &u8| {
                    matches!(b, b',' | b']' | b'}' | b'"' | b'{' | b'[' | b':')
                        || b.is_ascii_whitespace()
                };
                let n = rest.iter().position(stop).unwrap_or(rest.len()).max(1);
                visit(&path, i, i + n);
                i += n;
            }
        }
    }
    while let Some(container) = open.pop() {
        path.pop();
        visit(&path, container.start, text.len());
    }
}

/// One past the closing quote of the string that begins at `start`; always a character boundary.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut i = start + 1;
    while i < bytes.len() {
        match bytes[i] {
            b'\\' => i += 2,
            b'"' => return i + 1,
            _ => i += 1,
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "{ \"a\": [1,\n  {\"b\": \"x\\\"\", \"c\": null}],\n  \"d\": 3 }";

    #[test]
    fn paths_have_positions_and_back() {
        let root = Path::default();
        let c = root.key("a").index(1).key("c");
        for (path, at) in [
            (root.clone(), (1, 1)),
            (root.key("a"), (1, 8)),
            (root.key("a").index(0), (1, 9)),
            (root.key("a").index(1).key("b"), (2, 9)),
            (c.clone(), (2, 21)),
            (root.key("d"), (3, 8)),
        ] {
            assert_eq!(position(TEXT, &path), at, "{path}");
            assert_eq!(path_at(TEXT, at.0, at.1), path);
        }
        assert_eq!(c.to_string(), "a[1].c");
        assert_eq!(position(TEXT, &root.key("a").key("missing")), (1, 8));
    }

    #[test]
    fn broken_texts_are_followed_as_far_as_they_go() {
        for text in ["", "]", "{\"a", "[[[", "{\"a\": \"\\", "{é: [}", "[1, tru"] {
            position(text, &Path::default().index(7));
            path_at(text, 1, 3);
        }
    }
}
