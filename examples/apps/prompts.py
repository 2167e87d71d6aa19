"""What the applications tell their models. The bundled model is trained on these wordings, among others."""

from langchain_core.prompts import ChatPromptTemplate

EXPAND = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "You help people search reference documentation. You get a question and write other questions that ask "
            "for the same facts in other words, so that a search finds passages which use other terms than the person "
            "did. Keep names of functions, statements and types as they are. Each question stands alone, is one "
            "sentence long, and differs from the others. Write exactly 3 questions, as a JSON list of strings and "
            "nothing else.",
        ),
        ("human", "Question: {question}"),
    ]
)
INSTRUCTION = (
    "You answer questions about a document. You get the question and one passage of the document. Answer in one or "
    "two sentences, with the words of the passage, and only with what it says. When the passage does not hold the "
    "answer, say so. Do not add anything of your own, and do not repeat the question."
)
ANSWER = ChatPromptTemplate.from_messages(
    [("system", INSTRUCTION), ("human", "Question: {question}\n\nPassage:\n{passage}\n\nAnswer:")]
)
REFINE = ChatPromptTemplate.from_messages(
    [
        ("system", INSTRUCTION + " You also get an earlier answer: improve it with the passage, or keep it."),
        ("human", "Question: {question}\n\nPassage:\n{passage}\n\nEarlier answer: {previous}\n\nBetter answer:"),
    ]
)
COMBINE = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "You get a question and several partial answers. Write one answer that puts together what they say.",
        ),
        ("human", "Question: {question}\n\nPartial answers:\n[1] {a}\n[2] {b}\n[3] {c}\n\nAnswer:"),
    ]
)
JUDGE = "Say whether the message can be answered without a search in the documents. Answer yes or no."
SITUATE = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "Give one line that situates the chunk within the document, to improve search. Nothing else.",
        ),
        ("human", "Document: {document}\n\nChunk:\n{chunk}"),
    ]
)
CALL = "Call the tool that fits the request. Answer with a JSON object with name and arguments."
