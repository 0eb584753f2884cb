//! The answer inside a response.

use std::ops::Range;
use std::sync::LazyLock;

use regex::Regex;
use serde::{Deserialize, Serialize};

/// The form that a response must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tags {
    /// `<think>…</think><answer>…</answer>`, with nothing but white space between the two.
    #[default]
    ThinkAnswer,
    /// `<answer>…</answer>`.
    Answer,
    /// The whole response is the answer.
    None,
}

/// An answer that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The bytes of the response between the think tags, if that form is asked for.
    pub reasoning: Option<Range<usize>>,
    /// What is to be done, without tags inside it, trimmed.
    pub text: String,
}

/// Both patterns take the first that fits and end it as early as possible, as RAGEN does: text before
/// and after is no fault.
static THINK_ANSWER: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"(?s)<think>(.*?)</think>\s*<answer>(.*?)</answer>").ok());
static ANSWER: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"(?s)<answer>(.*?)</answer>").ok());

/// What RAGEN deletes from an answer, in this order.
const DELETED: [&str; 6] =
    ["<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>"];

impl Tags {
    /// The form as it is shown to the policy; empty if there is none.
    pub fn form(self) -> &'static str {
        match self {
            Self::ThinkAnswer => "<think>your thoughts</think><answer>your answer</answer>",
            Self::Answer => "<answer>your answer</answer>",
            Self::None => "",
        }
    }

    /// An answer put into this form.
    pub fn wrap(self, reasoning: &str, answer: &str) -> String {
        match self {
            Self::ThinkAnswer => format!("<think>{reasoning}</think><answer>{answer}</answer>"),
            Self::Answer => format!("<answer>{answer}</answer>"),
            Self::None => answer.to_owned(),
        }
    }

    /// The answer in a response; none if the response has not this form.
    pub fn parse(self, response: &str) -> Option<Answer> {
        match self {
            Self::ThinkAnswer => {
                let found = THINK_ANSWER.as_ref()?.captures(response)?;
                Some(Answer { reasoning: Some(found.get(1)?.range()), text: clean(&found[2]) })
            }
            Self::Answer => {
                let found = ANSWER.as_ref()?.captures(response)?;
                Some(Answer { reasoning: None, text: clean(&found[1]) })
            }
            Self::None => Some(Answer { reasoning: None, text: response.trim().to_owned() }),
        }
    }
}

fn clean(answer: &str) -> String {
    DELETED
        .iter()
        .fold(answer.trim().to_owned(), |text, tag| text.replace(tag, "").trim().to_owned())
}
