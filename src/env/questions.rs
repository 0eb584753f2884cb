//! Questions with one right answer, and another try after a wrong one.
//!
//! Rules of RAGEN's MetaMathQA: the question is to be seen; 1 for a right answer, halved at every retry;
//! `Correct!` ends the trajectory, else `Incorrect. Please think again.` Answers are compared without
//! case and white space ([`Comparison::Text`]). Where it differs: RAGEN allows one action as it is
//! configured, hence no retry, here it is 5; it draws a line by Python's `random`, here task `t` is line
//! `t` modulo their number; and GSM8K's form is read too.

use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::tasks::{self, Fault};
use super::{Answers, Environment, Outcome, Rational, Seed, error, require_running};
use crate::error::Result;

const NAME: &str = "questions";

/// A question and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// As it is asked.
    pub question: String,
    /// The answer alone.
    pub answer: String,
}

/// When two answers are equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Comparison {
    /// If they are the same text without case and white space, as in RAGEN: `1,000` is not `1000`.
    #[default]
    Text,
    /// Also if both are the same number: `$1,000.` and `1000.0`, `1/2` and `0.5`.
    Number,
}

impl Comparison {
    /// Whether the two are equal.
    pub fn equal(self, found: &str, expected: &str) -> bool {
        let (found, expected) = (normalise(found), normalise(expected));
        found == expected
            || self == Self::Number
                && number(&found).is_some_and(|it| Some(it) == number(&expected))
    }
}

fn normalise(answer: &str) -> String {
    answer.chars().filter(|sign| !sign.is_whitespace()).collect::<String>().to_lowercase()
}

/// A normalised answer as a number, without a dollar before it and a point or percent after it, and
/// without the commas between thousands.
fn number(answer: &str) -> Option<Rational> {
    let (sign, digits) = match answer.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", answer),
    };
    let digits = digits.strip_prefix('$').unwrap_or(digits);
    let digits = digits.strip_suffix('.').unwrap_or(digits);
    let digits = digits.strip_suffix('%').unwrap_or(digits);
    let mut groups = digits.split('.').next()?.split(',').skip(1);
    if !groups.all(|group| group.len() == 3) {
        return None;
    }
    Rational::parse(&format!("{sign}{}", digits.replace(',', "")))
}

/// A line of MetaMathQA (`query`, `response`) or GSM8K (`question`, `answer`); other keys are ignored.
#[derive(Deserialize)]
struct Line {
    #[serde(alias = "query")]
    question: String,
    #[serde(alias = "response")]
    answer: String,
}

/// The answer alone: what follows the last `####`, else the last `The answer is`, else all of a text of
/// one line.
fn final_answer(text: &str) -> Option<&str> {
    for mark in ["####", "The answer is"] {
        if let Some((_, answer)) = text.rsplit_once(mark) {
            return Some(answer.trim_start_matches(':').trim()).filter(|answer| !answer.is_empty());
        }
    }
    let text = text.trim();
    Some(text).filter(|text| !text.is_empty() && !text.contains('\n'))
}

fn question(line: &str) -> std::result::Result<Question, Fault> {
    let Line { question, answer } = tasks::json(line)?;
    if question.trim().is_empty() {
        return Err(Fault { field: "question", problem: "expected a question, found none".into() });
    }
    match final_answer(&answer) {
        Some(answer) => Ok(Question { question, answer: answer.to_owned() }),
        None => Err(Fault {
            field: "answer",
            problem:
                "expected an answer after `####` or `The answer is`, or alone on one line, found none"
                    .into(),
        }),
    }
}

/// The environment.
#[derive(Clone, Debug)]
pub struct Questions {
    questions: Arc<[Question]>,
    comparison: Comparison,
    current: Question,
    wrong: i32,
    is_right: bool,
}

impl Questions {
    /// Questions of JSONL in the form of MetaMathQA or GSM8K, in turn.
    ///
    /// # Errors
    /// If the file cannot be read or breaks the format.
    pub fn from_file(path: &Path, comparison: Comparison) -> Result<Self> {
        Self::new(tasks::read(path, question)?, comparison)
    }

    /// These questions, in turn: task `t` is number `t` modulo how many there are.
    ///
    /// # Errors
    /// If there are none.
    pub fn new(questions: Vec<Question>, comparison: Comparison) -> Result<Self> {
        let current = questions
            .first()
            .cloned()
            .ok_or_else(|| error(NAME, "expected at least one question, found none"))?;
        Ok(Self { questions: questions.into(), comparison, current, wrong: 0, is_right: false })
    }
}

impl Environment for Questions {
    fn name(&self) -> &str {
        NAME
    }

    fn instruction(&self) -> String {
        "Answer the question. Give the result alone.".into()
    }

    fn answers(&self) -> Answers {
        Answers::Text
    }

    fn max_actions(&self) -> usize {
        5
    }

    fn reset(&mut self, seed: Seed) -> Result<()> {
        self.current = tasks::in_turn(&self.questions, seed).clone();
        self.wrong = 0;
        self.is_right = false;
        Ok(())
    }

    fn observe(&self) -> String {
        match (self.is_right, self.wrong) {
            (true, _) => "Correct!".into(),
            (false, 0) => self.current.question.clone(),
            (false, _) => "Incorrect. Please think again.".into(),
        }
    }

    fn act(&mut self, action: &str) -> Result<Option<Outcome>> {
        require_running(NAME, self.is_right)?;
        if action.trim().is_empty() {
            return Ok(None);
        }
        self.is_right = self.comparison.equal(action, &self.current.answer);
        let reward = if self.is_right { 0.5_f64.powi(self.wrong) } else { 0.0 };
        self.wrong = self.wrong.saturating_add(i32::from(!self.is_right));
        let is_right = self.is_right;
        Ok(Some(Outcome { reward, done: is_right, success: is_right, effective: is_right }))
    }

    fn fork(&self) -> Result<Box<dyn Environment>> {
        Ok(Box::new(self.clone()))
    }
}
